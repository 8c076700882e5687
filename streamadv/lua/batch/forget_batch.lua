-- The last step of a commit in the home shard: the record of the batch is removed.
-- KEYS  void, session, batches
-- fenced by session
-- ARGV  epoch, k, record JSON
-- Returns  1, 0 when it was gone or another record stands there
if redis.call('HGET', keys.batches, ARGV[2]) ~= ARGV[3] then return 0 end
return redis.call('HDEL', keys.batches, ARGV[2])
