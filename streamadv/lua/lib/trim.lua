-- Forget the oldest kept groups: while they fill more than seven eighths of the budget, so that there is room for new ones,
-- and all in turn above maxmemory. In a run with an archive only those that the archive has.
-- KEYS  kept, ledger, trainer, garbage, admission
-- include announce
local TRIM_COUNT = 64

-- Groups up to this entry may go: the field `archived` of `trainer` says which one the archive has reached.
local function last_to_go(archives)
  return archives and (redis.call('HGET', keys.trainer, 'archived') or '0') or '+'
end

local function kept_bytes() return tonumber(redis.call('HGET', keys.ledger, 'kept_bytes') or '') or 0 end

-- keeping: what the scripts that keep may, see lib/keep. Returns the number of groups forgotten; TRIM_COUNT = there may be
-- more.
local function trim(keeping)
  local budget, archives = tonumber(string.match(keeping, '^%d+')), string.match(keeping, ' archive$')
  local most, last, forgotten, before = math.floor(budget * 7 / 8), last_to_go(archives), 0, kept_bytes()
  while forgotten < TRIM_COUNT do
    local is_due = kept_bytes() > most or not has_memory
    local oldest = is_due and redis.call('XRANGE', keys.kept, '-', last, 'COUNT', 1)[1]
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
  if archives and before > budget and kept_bytes() <= budget then announce() end
  return forgotten
end
