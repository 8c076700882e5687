-- Tell the scripts that keep what they may (lib/keep), and forget the oldest kept groups: while they fill more than
-- seven eighths of it, so that there is room for new ones, and all in turn above maxmemory.
-- KEYS  void, kept, ledger, trainer, garbage
-- ARGV  bytes of the shard, then the share of each kind, separated by blanks
-- Returns  number of groups forgotten; TRIM_COUNT = there may be more
local TRIM_COUNT = 64
if redis.call('HGET', keys.trainer, 'keep') ~= ARGV[1] then redis.call('HSET', keys.trainer, 'keep', ARGV[1]) end
local most, forgotten = math.floor(tonumber(string.match(ARGV[1], '^%d+')) * 7 / 8), 0
while forgotten < TRIM_COUNT do
  local used = tonumber(redis.call('HGET', keys.ledger, 'kept_bytes') or '') or 0
  local oldest = (used > most or not has_memory) and redis.call('XRANGE', keys.kept, '-', '+', 'COUNT', 1)[1]
  if not oldest then break end
  local named, payloads = {}, 0
  for i = 1, #oldest[2], 2 do named[oldest[2][i]] = oldest[2][i + 1] end
  redis.call('XDEL', keys.kept, oldest[1])
  for item, size in string.gmatch(named.payloads or '', '(%S+ (%d+)) %d+ %S+') do
    redis.call('RPUSH', keys.garbage, item)
    payloads = payloads + tonumber(size)
  end
  redis.pcall('HINCRBY', keys.ledger, 'kept_bytes', string.format('%d', -(tonumber(named.bytes or '') or 0)))
  redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', payloads))
  forgotten = forgotten + 1
end
return forgotten
