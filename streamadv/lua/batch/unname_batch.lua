-- Undo the naming of batch k: its record goes, and the running moments are again those before it.
-- KEYS  void, session, batches
-- fenced by session
-- ARGV  fence, k, batch id, running moments JSON before the batch ('' = none)
-- Returns  1, 0 when the record was gone or another one stands there
local record = redis.call('HGET', keys.batches, ARGV[2]) or ''
if not string.find(record, '"id":"' .. ARGV[3] .. '"', 1, true) then return 0 end
redis.call('HDEL', keys.batches, ARGV[2])
if ARGV[4] == '' then redis.call('HDEL', keys.session, 'running') else redis.call('HSET', keys.session, 'running', ARGV[4]) end
return 1
