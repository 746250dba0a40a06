"""One module for each part of the HTTP interface, from the route to the answer; what they share is in `services`."""
