-- Take over pending entries that have not been delivered again since the caller looked at them.
-- KEYS  void, stream: rollouts | scoring | work
-- ARGV  consumer group, consumer that takes them, then for each entry: entry id, consumer that had it, times delivered
-- Returns  {entry id, fields} of each entry taken over; one that the stream no longer has is acknowledged
local entries = {}
for i = 3, #ARGV, 3 do
  local there = redis.call('XPENDING', keys.stream, ARGV[1], ARGV[i], ARGV[i], 1)[1]
  if there and there[2] == ARGV[i + 1] and tostring(there[4]) == ARGV[i + 2] then
    local claimed = redis.call('XCLAIM', keys.stream, ARGV[1], ARGV[2], 0, ARGV[i])
    if claimed[1] then entries[#entries + 1] = claimed[1] else redis.call('XACK', keys.stream, ARGV[1], ARGV[i]) end
  end
end
return entries
