-- Finish an entry without a result: what it asked for no longer exists.
-- KEYS  void, stream
-- ARGV  consumer group, entry id
-- Returns  1, or 0 when somebody else has finished it
redis.call('DEL', KEYS[1])
if redis.call('XACK', KEYS[2], ARGV[1], ARGV[2]) == 0 then return 0 end
return redis.call('XDEL', KEYS[2], ARGV[2])
