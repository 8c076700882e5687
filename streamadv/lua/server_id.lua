-- Which server has this key. Changes nothing.
-- KEYS  any key of the shard: sends the question to the primary of its slot
-- Returns  the server's run id, another one after every restart and on every other server; nil where INFO is missing
--          or not permitted
local info = redis.pcall('INFO', 'server')
return type(info) == 'string' and string.match(info, 'run_id:(%w+)') or false
