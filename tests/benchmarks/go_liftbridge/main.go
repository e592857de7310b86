// Publishes messages to a stream with go-liftbridge's PublishAsync, waits for all acks, and prints
// how many were acked in a second: go run . HOST:PORT STREAM COUNT SIZE WINDOW
package main

import (
	"bytes"
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	lift "github.com/liftbridge-io/go-liftbridge/v2"
)

func number(text string) int {
	n, err := strconv.Atoi(text)
	if err != nil {
		log.Fatal(err)
	}
	return n
}

func main() {
	address, stream := os.Args[1], os.Args[2]
	count, size, window := number(os.Args[3]), number(os.Args[4]), number(os.Args[5])
	client, err := lift.Connect([]string{address})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	value := bytes.Repeat([]byte("x"), size)
	room := make(chan struct{}, window)
	start := time.Now()
	for i := 0; i < count; i++ {
		room <- struct{}{}
		err := client.PublishAsync(context.Background(), stream, value,
			func(_ *lift.Ack, err error) {
				if err != nil {
					log.Fatal(err)
				}
				<-room
			}, lift.AckPolicyLeader())
		if err != nil {
			log.Fatal(err)
		}
	}
	for i := 0; i < window; i++ {
		room <- struct{}{}
	}
	fmt.Printf("%.0f\n", float64(count)/time.Since(start).Seconds())
}
