-- play(keys, producer): this producer plays an open group, which counts in pacing (again).
--   keys  group, ledger
local function play(keys, producer)
  if redis.call('HGET', keys.group, 'abandoned') == '1' then redis.pcall('HINCRBY', keys.ledger, 'groups_abandoned', -1) end
  redis.call('HSET', keys.group, 'producer', producer, 'abandoned', 0)
end
