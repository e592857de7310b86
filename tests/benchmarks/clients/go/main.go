// Reads a feed to its end with net/http and encoding/json: reader URL DIALECT
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"time"
)

type line struct {
	Data   json.RawMessage `json:"data"`
	Cursor *string         `json:"cursor"`
}

func address(feed, dialect, cursor string) string {
	query := url.Values{}
	if dialect == "v1" {
		query.Set("n", "1")
		query.Set("cursor0", cursor)
		return feed + "?" + query.Encode()
	}
	query.Set("token", "t")
	query.Set("partition", "0")
	query.Set("cursor", cursor)
	return feed + "/events?" + query.Encode()
}

func page(target string) (events int, cursor string, err error) {
	response, err := http.Get(target)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return 0, "", fmt.Errorf("status %d", response.StatusCode)
	}
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(make([]byte, 64*1024), 16*1024*1024)
	for lines.Scan() {
		var each line
		if err := json.Unmarshal(lines.Bytes(), &each); err != nil {
			return 0, "", err
		}
		if each.Cursor != nil {
			cursor = *each.Cursor
			continue
		}
		var payload map[string]any
		if err := json.Unmarshal(each.Data, &payload); err != nil {
			return 0, "", err
		}
		events++
	}
	return events, cursor, lines.Err()
}

func main() {
	feed, dialect := os.Args[1], os.Args[2]
	started, total, cursor := time.Now(), 0, "_first"
	for {
		events, next, err := page(address(feed, dialect, cursor))
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		if events == 0 {
			break
		}
		total += events
		cursor = next
	}
	fmt.Println(total, time.Since(started).Seconds())
}
