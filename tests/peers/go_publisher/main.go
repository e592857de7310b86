// A publisher as an application builds one with the published Go library.
//
// It serves /feed on a port of its own, which it prints. Each line on its standard input is a
// command in JSON, and is answered by a line: "ok", or what is wrong with it.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"sync"

	"github.com/sirupsen/logrus"
	"github.com/vippsas/feedapi-go/feedapi"
)

const defaultPageSize = 100

// A command changes what is given in it.
type command struct {
	// The discovery. Handlers keep the token and the partitions of the one that they began with,
	// as those of a deployment do: "Restart" begins anew with the present one.
	Info    *feedapi.FeedInfo `json:"info"`
	Restart bool              `json:"restart"`
	// Appends to the log of a partition. A null is an event of another partition: it has a place,
	// and is not sent.
	Partition int               `json:"partition"`
	Events    []json.RawMessage `json:"events"`
	// "v1", or anything else for v2.
	Dialect *string `json:"dialect"`
	// What an empty page holds: "echo" the cursor asked with, "own" cursor, or nothing.
	Empty *string `json:"empty"`
	// Events between two checkpoints.
	CheckpointEvery int `json:"checkpointEvery"`
	// Fails behind so many events of a page, in the middle of the response.
	FailBehind *int `json:"failBehind"`
}

type publisher struct {
	lock            sync.RWMutex
	info            feedapi.FeedInfo
	logs            map[int][]json.RawMessage
	empty           string
	dialect         string
	checkpointEvery int
	failBehind      int
	handlers        feedapi.HTTPHandlers
}

func (p *publisher) GetName() string { return "feed" }

func (p *publisher) GetFeedInfo() feedapi.FeedInfo {
	p.lock.RLock()
	defer p.lock.RUnlock()
	return p.info
}

// log returns what a partition holds now, and how its pages are made.
func (p *publisher) log(partition int) ([]json.RawMessage, string, int, int) {
	p.lock.RLock()
	defer p.lock.RUnlock()
	return p.logs[partition], p.empty, p.checkpointEvery, p.failBehind
}

func (p *publisher) FetchEvents(
	_ context.Context, _ string, partition int, cursor string,
	receiver feedapi.EventReceiver, options feedapi.Options,
) error {
	log, empty, checkpointEvery, failBehind := p.log(partition)
	position, err := positionOf(cursor, len(log))
	if err != nil {
		return err
	}
	size := options.PageSizeHint
	if size == feedapi.DefaultPageSize {
		size = defaultPageSize
	}
	sent, unclosed := 0, false
	for position < len(log) && sent < size {
		event := log[position]
		position++
		if string(event) != "null" && wanted(event, options.EventTypes) {
			if failBehind > 0 && sent == failBehind {
				return fmt.Errorf("the database is gone")
			}
			if err := receiver.Event(event); err != nil {
				return err
			}
			sent++
		}
		if unclosed = position%checkpointEvery != 0; !unclosed {
			if err := receiver.Checkpoint(strconv.Itoa(position)); err != nil {
				return err
			}
		}
		empty = ""
	}
	switch {
	case unclosed:
		return receiver.Checkpoint(strconv.Itoa(position))
	case empty == "echo":
		return receiver.Checkpoint(cursor)
	case empty == "own":
		return receiver.Checkpoint(strconv.Itoa(position))
	}
	return nil
}

func positionOf(cursor string, end int) (int, error) {
	switch cursor {
	case feedapi.FirstCursor:
		return 0, nil
	case feedapi.LastCursor:
		return end, nil
	}
	return strconv.Atoi(cursor)
}

func wanted(event json.RawMessage, types []string) bool {
	if types == nil {
		return true
	}
	var typed struct{ Type string }
	_ = json.Unmarshal(event, &typed)
	return slices.Contains(types, typed.Type)
}

func (p *publisher) ServeHTTP(writer http.ResponseWriter, request *http.Request) {
	p.lock.RLock()
	handlers, dialect := p.handlers, p.dialect
	p.lock.RUnlock()
	switch {
	case request.URL.Path == "/feed" && dialect == "v1":
		handlers.ZeroEventHubV1Handler(writer, request)
	case request.URL.Path == "/feed":
		handlers.DiscoveryHandler(writer, request)
	case request.URL.Path == "/feed/events" && dialect != "v1":
		handlers.EventsHandler(writer, request)
	default:
		writer.WriteHeader(http.StatusNotFound)
	}
}

func (p *publisher) apply(change command) {
	p.lock.Lock()
	if change.Info != nil {
		p.info = *change.Info
	}
	for _, event := range change.Events {
		p.logs[change.Partition] = append(p.logs[change.Partition], event)
	}
	if change.Dialect != nil {
		p.dialect = *change.Dialect
	}
	if change.Empty != nil {
		p.empty = *change.Empty
	}
	if change.CheckpointEvery > 0 {
		p.checkpointEvery = change.CheckpointEvery
	}
	if change.FailBehind != nil {
		p.failBehind = *change.FailBehind
	}
	p.lock.Unlock()
	if change.Restart {
		handlers := feedapi.NewHTTPHandlers(p, quiet)
		p.lock.Lock()
		p.handlers = handlers
		p.lock.Unlock()
	}
}

func quiet(*http.Request) logrus.FieldLogger {
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	return logger
}

func main() {
	served := &publisher{logs: map[int][]json.RawMessage{}, empty: "own", checkpointEvery: 10}
	served.apply(command{Restart: true})
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	go func() { panic(http.Serve(listener, served)) }()
	fmt.Printf("http://%s/feed\n", listener.Addr())

	lines := bufio.NewReader(os.Stdin)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			return // who started it is gone
		}
		var change command
		if err := json.Unmarshal(line, &change); err != nil {
			fmt.Println(err)
			continue
		}
		served.apply(change)
		fmt.Println("ok")
	}
}
