-- Count something removed that no process of this run wrote, and list it with the reason; MALFORMED_KEPT are listed.
-- KEYS  ledger, malformed
local MALFORMED_KEPT = 1000
local MALFORMED_ITEM = 800  -- bytes of an item, which may be any; whoever notes it bounds the rest

local function note_malformed(place, item, detail, text)
  redis.pcall('HINCRBY', keys.ledger, 'malformed', 1)
  redis.call('XADD', keys.malformed, 'MAXLEN', MALFORMED_KEPT, '*', 'place', place, 'item',
    string.sub(item, 1, MALFORMED_ITEM), 'detail', detail, 'text', text)
end
