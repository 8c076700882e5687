-- Delete payloads that a script has put on the garbage list, and give their bytes back.
-- KEYS  void, garbage, ledger, payload of each item ...
-- ARGV  items as they stand in the list: '<payload key> <bytes>' ...
-- Returns  number of items deleted; one that somebody else has deleted is skipped
redis.call('DEL', KEYS[1])
local deleted, bytes = 0, 0
for i, item in ipairs(ARGV) do
  if redis.call('LREM', KEYS[2], 1, item) == 1 then
    redis.call('UNLINK', KEYS[3 + i])
    bytes = bytes + tonumber(string.match(item, ' (%d+)$'))
    deleted = deleted + 1
  end
end
if deleted > 0 then redis.pcall('HINCRBY', KEYS[3], 'live_bytes', string.format('%d', -bytes)) end
return deleted
