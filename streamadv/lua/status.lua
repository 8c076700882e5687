-- One consistent reading of a shard. Changes nothing.
-- KEYS  ledger, trainer, open, groups, ready, applied, ended, ended_before, garbage, sizes, rollouts, work, scorer streams ...
-- ARGV  max_trajectory_bytes, consumer group of each stream from rollouts on ...
-- Returns  {ledger, trainer, open groups, groups logged, ready, applied, ended, garbage, now (ms),
--           bytes reserved, bytes a place needs,
--           {stream length, pending, lag or -1, consumers, oldest entry id or ''} of each stream ...}
-- include clock
-- include sizes
local function stream_state(key, group)
  if redis.call('EXISTS', key) == 0 then return {0, 0, 0, 0, ''} end
  local pending, lag, consumers = 0, 0, 0
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', key)) do
    local info = {}
    for i = 1, #flat, 2 do info[flat[i]] = flat[i + 1] end
    if info.name == group then
      pending, lag, consumers = info.pending, tonumber(info.lag or -1) or -1, info.consumers
    end
  end
  local oldest = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)
  return {redis.call('XLEN', key), pending, lag, consumers, oldest[1] and oldest[1][1] or ''}
end

local known = read_sizes(KEYS[10])
local each = place_bytes(known, tonumber(ARGV[1]))
local reply = {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('ZCARD', KEYS[3]),
  redis.call('XLEN', KEYS[4]), redis.call('XLEN', KEYS[5]), redis.call('HLEN', KEYS[6]),
  redis.call('HLEN', KEYS[7]) + redis.call('HLEN', KEYS[8]), redis.call('LLEN', KEYS[9]), now_ms(),
  string.format('%d', reserved_bytes(known, each)), string.format('%d', each)}
for i = 11, #KEYS do reply[#reply + 1] = stream_state(KEYS[i], ARGV[i - 9]) end
return reply
