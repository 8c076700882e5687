-- Extend the deadline of an open group to so many ms from now (never shorten it).
-- KEYS  void, open, group, ledger, trainer
-- ARGV  group id, deadline (ms from now), producer
-- Returns  1, or 0 when the group is not open
-- include clock
-- include count
-- include group
local deadline = tonumber(redis.call('ZSCORE', keys.open, ARGV[1]) or '')
if not deadline then return 0 end
local now = shard_ms(redis.call('HMGET', keys.trainer, 'clock')[1], now_ms())
deadline = math.max(deadline, now + tonumber(ARGV[2]))
redis.call('ZADD', keys.open, string.format('%.17g', deadline), ARGV[1])
local group = load_group(ARGV[1], keys.group)
if group.state == 'open' then
  play(group, ARGV[3])
  save_group(group)
  write_counts()
end
return 1
