-- What nobody of this run wrote is removed, counted and listed with the reason; MALFORMED_KEPT are listed.
--   keys  ledger, malformed
local MALFORMED_KEPT = 1000

-- `count` records have left their stream, in which `length` are left. Those that the push script never counted
-- arrive only now.
local function leave(keys, counter, count, length)
  local counted = tonumber(redis.call('HGET', keys.ledger, counter) or '') or 0
  local uncounted = math.min(count, math.max(0, length + count - counted))
  if count > uncounted then redis.pcall('HINCRBY', keys.ledger, counter, uncounted - count) end
  if uncounted > 0 then redis.pcall('HINCRBY', keys.ledger, 'pushed', uncounted) end
end

local function note_malformed(keys, place, item, count, detail, text)
  redis.pcall('HINCRBY', keys.ledger, 'malformed', 1)
  if count > 0 then redis.pcall('HINCRBY', keys.ledger, 'dead:malformed', count) end
  redis.call('XADD', keys.malformed, 'MAXLEN', MALFORMED_KEPT, '*', 'place', place, 'item', item, 'count', count,
    'detail', detail, 'text', text)
end
