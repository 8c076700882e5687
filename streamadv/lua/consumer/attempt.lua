-- Count an attempt to compute a group alone, or to score a trajectory, before it is made: otherwise a crash would not
-- be counted.
-- KEYS  void, attempts
-- ARGV  group id (of a trajectory: scorer, group id and index), '1' to count, '0' to forget
-- Returns  attempts so far, this one included
if ARGV[2] == '0' then return redis.call('HDEL', keys.attempts, ARGV[1]) end
if not string.match(redis.call('HGET', keys.attempts, ARGV[1]) or '0', '^%d%d?%d?%d?$') then
  redis.call('HDEL', keys.attempts, ARGV[1])  -- a foreign process wrote it
end
local attempts = redis.call('HINCRBY', keys.attempts, ARGV[1], 1)
redis.call('PEXPIRE', keys.attempts, 86400000)  -- expires: a worker may die here after another one has finished the group
return attempts
