-- The last step of a commit in the home shard: the record of the batch is removed.
-- KEYS  void, session, batches
-- fenced by session
-- ARGV  epoch, k, batch id
-- Returns  1, 0 when it was gone or another record stands there
local record = redis.call('HGET', keys.batches, ARGV[2]) or ''
if not string.find(record, '"id":"' .. ARGV[3] .. '"', 1, true) then return 0 end
return redis.call('HDEL', keys.batches, ARGV[2])
