"""The clock, the meters of memory and of bytes on the wire, and the processes that things are measured in."""
