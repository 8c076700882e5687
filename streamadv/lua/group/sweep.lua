-- Delete payloads that a script has put on the garbage list, and give their bytes back.
-- KEYS  void, garbage, ledger, payloads: payload ...
-- ARGV  items as they stand in the list: '<payload key> <bytes>' ...
-- Returns  number of items deleted; one that somebody else has deleted is skipped
local deleted, bytes = 0, 0
for i, item in ipairs(ARGV) do
  if redis.call('LREM', keys.garbage, 1, item) == 1 then
    redis.call('UNLINK', keys.payloads[i])
    bytes = bytes + tonumber(string.match(item, ' (%d+)$'))
    deleted = deleted + 1
  end
end
if deleted > 0 then redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -bytes)) end
return deleted
