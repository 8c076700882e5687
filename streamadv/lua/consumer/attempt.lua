-- Count an attempt to compute a group alone, or to score a trajectory, before it is made: a crash must not go uncounted.
-- KEYS  void, attempts
-- ARGV  group id (of a trajectory: scorer, group id and index), '1' to count, '0' to forget
-- Returns  attempts so far, this one included
redis.call('DEL', KEYS[1])
if ARGV[2] == '0' then return redis.call('HDEL', KEYS[2], ARGV[1]) end
if not string.match(redis.call('HGET', KEYS[2], ARGV[1]) or '0', '^%d%d?%d?%d?$') then
  redis.call('HDEL', KEYS[2], ARGV[1])  -- nothing this script has written
end
local attempts = redis.call('HINCRBY', KEYS[2], ARGV[1], 1)
redis.call('PEXPIRE', KEYS[2], 86400000)  -- a worker killed behind somebody who finished the group leaves its count
return attempts
