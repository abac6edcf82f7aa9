"""One method, one file. The file's name is the connection's name, and nothing is registered."""
