-- Extend the deadline of an open group to `deadline` ms from now (never shorten it).
-- KEYS  void, open
-- ARGV  group id, deadline (ms from now)
-- Returns  1, or 0 when the group is not open
-- include clock
redis.call('DEL', KEYS[1])
local score = tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or '')
if not score then return 0 end
local deadline = math.max(score, now_ms() + tonumber(ARGV[2]))
redis.call('ZADD', KEYS[2], string.format('%.17g', deadline), ARGV[1])
return 1
