-- The trainer's checkpoint now contains every batch below `committed`: first step of a commit.
-- KEYS  void, lineage
-- ARGV  epoch, committed
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local committed = tonumber(redis.call('HGET', KEYS[2], 'committed') or '') or 0
redis.call('HSET', KEYS[2], 'committed', string.format('%.17g', math.max(committed, tonumber(ARGV[2]))))
return 1
