-- Count an attempt to compute a group alone, or to score a trajectory, before it is made: a crash must not go uncounted.
-- KEYS  void, attempts
-- ARGV  group id (of a trajectory: scorer, group id and index), '1' to count, '0' to forget
-- Returns  attempts so far, this one included
if ARGV[2] == '0' then return redis.call('HDEL', keys.attempts, ARGV[1]) end
if not string.match(redis.call('HGET', keys.attempts, ARGV[1]) or '0', '^%d%d?%d?%d?$') then
  redis.call('HDEL', keys.attempts, ARGV[1])  -- nothing this script has written
end
local attempts = redis.call('HINCRBY', keys.attempts, ARGV[1], 1)
redis.call('PEXPIRE', keys.attempts, 86400000)  -- a worker killed behind somebody who finished the group leaves its count
return attempts
