-- Which server has the shard, and since when it is the primary. Changes nothing.
-- KEYS  (void)
-- Returns  run id and replication id, nil where INFO is missing or not permitted. They change with a restart, with another
--          server, and when a server is the primary again after another one was
local info = redis.pcall('INFO', 'server')
local run_id = type(info) == 'string' and string.match(info, 'run_id:(%w+)')
if not run_id then return false end
info = redis.pcall('INFO', 'replication')
return run_id .. ' ' .. (type(info) == 'string' and string.match(info, 'master_replid:(%w+)') or '')
