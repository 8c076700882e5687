-- Which server has this key, and since when it is the primary. Changes nothing.
-- KEYS  (void)
-- Returns  run id and replication id: another after every restart, on every other server, and on one that lost its place
--          and got it back; nil where INFO is missing or not permitted
local info = redis.pcall('INFO', 'server')
local run_id = type(info) == 'string' and string.match(info, 'run_id:(%w+)')
if not run_id then return false end
info = redis.pcall('INFO', 'replication')
return run_id .. ' ' .. (type(info) == 'string' and string.match(info, 'master_replid:(%w+)') or '')
