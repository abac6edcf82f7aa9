"""One method, one file. The file's name is the connection's name, and nothing is registered.

A file whose name begins with an underscore is what several methods share.
"""
