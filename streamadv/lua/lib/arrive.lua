-- Count records that were appended to streams, and free what their slots had reserved.
-- KEYS  group, ledger, sizes
--   arrived  rollouts and scoring: records appended to each stream; bytes: of all payloads; sizes: of each payload
local function arrive(arrived, producer)
  local count = arrived.rollouts + arrived.scoring
  if count == 0 then return end
  redis.pcall('HINCRBY', keys.ledger, 'pushed', count)
  if arrived.rollouts > 0 then redis.pcall('HINCRBY', keys.ledger, 'rollouts', arrived.rollouts) end
  if arrived.scoring > 0 then redis.pcall('HINCRBY', keys.ledger, 'scoring', arrived.scoring) end
  if #arrived.sizes > 0 then
    redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', arrived.bytes))
    note_sizes(keys.sizes, arrived.sizes)
  end
  redis.call('HINCRBY', keys.group, 'unfilled', -count)
  reserve(keys.sizes, redis.call('HGET', keys.group, 'slot_bytes'), -count)
  play(producer)
end
