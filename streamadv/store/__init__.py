"""The server: how it is reached, what is stored there under which keys, and the scripts that change it.

Reaching it: `urls` (a URL becomes a target), `credentials`, `tls`, `clients` (how redis-py's clients are made), `resp`
(commands with large values), `exchange` (a call and its replies over one connection), `pipelined` (many calls of an
asyncio process over one connection), `connection` (one client per way of failing).

When it does not answer: `reasons` (why somebody waits), `waiting`, `retry` (transient errors are tried again).

What it holds: `keys`, `scripts` (named keys and fences), `calls` (sending them), `replies` (reading what anybody may
have written), `acl` (access rules of the roles).

A server on this machine: `binary`, `addresses`, `embedded`.
"""
