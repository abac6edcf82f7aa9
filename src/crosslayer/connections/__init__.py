"""One method, one file. The file's name is the connection's name, and nothing is registered.

What several methods share is in files whose names begin with an underscore. Post-norm has the state
of `prenorm`, and ResiDual the norms of `postnorm`.
"""
