"""The server: how processes reach it, which keys it stores, and the scripts that change them.

- Reaching it: `urls` (parses a URL; passwords), `tls`, `clients` (makes redis-py's clients), `exchange` (that of one
  server: calls and their replies over one connection), `pipelined` (many calls of an asyncio process over one
  connection), `connection` (up to three clients per process, by what may be repeated).
- When it does not answer: `reasons` (the list of reasons to wait), `waiting`, `retry` (repeats after transient
  errors).
- What it holds: `keys`, `scripts` (names, keys and fences; sends calls of them), `replies` (reads untrusted
  replies), `acl` (access rules of the roles).
- A server on this machine: `embedded`.
"""
