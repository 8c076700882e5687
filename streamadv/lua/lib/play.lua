-- play(producer): this producer plays an open group, which counts in pacing (again).
-- KEYS  group, ledger
local function play(producer)
  if redis.call('HGET', keys.group, 'abandoned') == '1' then redis.pcall('HINCRBY', keys.ledger, 'groups_abandoned', -1) end
  redis.call('HSET', keys.group, 'producer', producer, 'abandoned', 0)
end
