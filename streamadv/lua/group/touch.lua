-- Extend the deadline of an open group to so many ms from now (never shorten it).
-- KEYS  void, open, group, ledger
-- ARGV  group id, deadline (ms from now), producer
-- Returns  1, or 0 when the group is not open
-- include clock
-- include count
-- include group
local deadline = tonumber(redis.call('ZSCORE', keys.open, ARGV[1]) or '')
if not deadline then return 0 end
deadline = math.max(deadline, now_ms() + tonumber(ARGV[2]))
redis.call('ZADD', keys.open, string.format('%.17g', deadline), ARGV[1])
local group = load_group(ARGV[1], keys.group)
if group.state == 'open' then
  play(group, ARGV[3])
  save_group(group)
  write_counts()
end
return 1
