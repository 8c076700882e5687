-- close_batch(batch, first, count): the shard forgets a batch and its results. ARGV from `first` on: entry of the results
-- log and bytes of its output columns, of each result; their outputs are the first keys of `unlinked`.
-- KEYS  results, applied, ledger, unlinked
local function close_batch(batch, first, count)
  for i = 1, count do
    local entry, bytes = ARGV[first + 2 * i - 2], ARGV[first + 2 * i - 1]
    local late = redis.pcall('HGET', keys.unlinked[i], 'late_bytes')  -- see keep_late
    bytes = bytes + (tonumber(type(late) == 'string' and late or '') or 0)
    if redis.call('XDEL', keys.results, entry) == 1 and redis.call('UNLINK', keys.unlinked[i]) == 1 then
      redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -bytes))  -- once for copies of an entry
    end
  end
  return redis.call('HDEL', keys.applied, batch)
end
