-- Drop the record of a committed batch: the last step of a commit.
-- KEYS  void, lineage, batches
-- ARGV  epoch, k, record JSON
-- Returns  1, 0 when it was gone or another record stands there, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HGET', KEYS[3], ARGV[2]) ~= ARGV[3] then return 0 end
return redis.call('HDEL', KEYS[3], ARGV[2])
