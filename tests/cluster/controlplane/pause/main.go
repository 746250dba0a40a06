// Command pause holds a pod's namespaces: it waits until it is told to end, and buries what it inherits.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	told := make(chan os.Signal, 1)
	signal.Notify(told, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for each := range told {
		if each != syscall.SIGCHLD {
			return
		}
		for {
			if ended, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); ended <= 0 || err != nil {
				break
			}
		}
	}
}
