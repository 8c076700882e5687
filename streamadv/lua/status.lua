-- One consistent reading of a shard. Changes nothing.
-- KEYS  ledger, trainer, open, groups, ready, applied, ended, ended_before, garbage, rollouts, work, scorer streams ...
-- ARGV  consumer group of each stream from rollouts on ...
-- Returns  {ledger, trainer, open groups, groups logged, ready, applied, ended, garbage, now (ms),
--           {stream length, pending, lag or -1, consumers, oldest entry id or ''} of each stream ...}
-- include clock
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

local reply = {redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2]), redis.call('ZCARD', KEYS[3]),
  redis.call('XLEN', KEYS[4]), redis.call('XLEN', KEYS[5]), redis.call('HLEN', KEYS[6]),
  redis.call('HLEN', KEYS[7]) + redis.call('HLEN', KEYS[8]), redis.call('LLEN', KEYS[9]), now_ms()}
for i = 10, #KEYS do reply[#reply + 1] = stream_state(KEYS[i], ARGV[i - 9]) end
return reply
