-- What nobody of this run wrote is removed, counted and listed with the reason; MALFORMED_KEPT are listed.
--   keys  ledger, malformed
local MALFORMED_KEPT = 1000

-- A record has left its stream, in which `length` are left. One that the push script never counted arrives only now.
local function leave(keys, counter, length)
  if (tonumber(redis.call('HGET', keys.ledger, counter) or '') or 0) > length then
    redis.call('HINCRBY', keys.ledger, counter, -1)
  else
    redis.call('HINCRBY', keys.ledger, 'pushed', 1)
  end
end

local function note_malformed(keys, place, item, count, detail, text)
  redis.call('HINCRBY', keys.ledger, 'malformed', 1)
  if count > 0 then redis.call('HINCRBY', keys.ledger, 'dead:malformed', count) end
  redis.call('XADD', keys.malformed, 'MAXLEN', MALFORMED_KEPT, '*', 'place', place, 'item', item, 'count', count,
    'detail', detail, 'text', text)
end
