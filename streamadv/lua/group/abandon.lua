-- A producer is lost: its open groups do not count in pacing until somebody pushes to them or touches them.
-- KEYS  void, ledger, open, hash of each group ...
-- ARGV  producer, id of each group ...
-- Returns  number of groups that it was the last to open, push to or touch, and that count no more
redis.call('DEL', KEYS[1])
local abandoned = 0
for i = 4, #KEYS do
  local group = redis.pcall('HMGET', KEYS[i], 'producer', 'abandoned')
  if not group.err and group[1] == ARGV[1] and group[2] ~= '1' and redis.call('ZSCORE', KEYS[3], ARGV[i - 2]) then
    redis.call('HSET', KEYS[i], 'abandoned', 1)
    abandoned = abandoned + 1
  end
end
if abandoned > 0 then redis.pcall('HINCRBY', KEYS[2], 'groups_abandoned', abandoned) end
return abandoned
