-- Extend the deadline of an open group to `deadline` ms from now (never shorten it).
-- KEYS  void, open, group, ledger
-- ARGV  group id, deadline (ms from now), producer
-- Returns  1, or 0 when the group is not open
-- include clock
-- include play
redis.call('DEL', KEYS[1])
local score = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or '')
if not score then return 0 end
local deadline = math.max(score, now_ms() + tonumber(ARGV[2]))
redis.call('ZADD', KEYS[2], string.format('%.17g', deadline), ARGV[1])
local group = redis.pcall('HMGET', KEYS[3], 'size')
if not group.err and group[1] then play({group = KEYS[3], ledger = KEYS[4]}, ARGV[3]) end
return 1
