"""The server: URLs, clients, retries, scripts, keys, access rules, and a server of our own."""
