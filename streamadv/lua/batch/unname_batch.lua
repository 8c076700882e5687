-- Undo the naming of batch k: its record goes, and the running moments are again those before it.
-- KEYS  void, session, batches
-- fenced by session
-- ARGV  epoch, k, record JSON, running moments JSON before the batch ('' = none)
-- Returns  1, 0 when the record was gone or another one stands there
if redis.call('HGET', keys.batches, ARGV[2]) ~= ARGV[3] then return 0 end
redis.call('HDEL', keys.batches, ARGV[2])
if ARGV[4] == '' then
  redis.call('HDEL', keys.session, 'running')
else
  redis.call('HSET', keys.session, 'running', ARGV[4])
end
return 1
