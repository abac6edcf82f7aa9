"""One method, one file. The file's name is the connection's name; nothing needs to be registered."""
