-- Commit groups of one shard: counted as trained, payloads deleted. Idempotent for each group, since only the call
-- that deletes the log entry counts it.
-- KEYS  void, trainer, groups, ledger, applied, payload of each trajectory ...
-- ARGV  epoch, batch id, then for each group: entry id, number trained, number of other terminal states, reason, count, ...,
--       bytes, number of payloads
-- Returns  number of groups committed, -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
local groups, bytes, at, payload = 0, 0, 3, 6
-- A server that came back without its last moments may know the groups, but not that they were named.
local place = redis.call('HEXISTS', KEYS[5], ARGV[2]) == 1 and 'in_flight' or 'grouped'
while at <= #ARGV do
  local entry, trained, others = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local tail = at + 3 + 2 * others
  local payloads = tonumber(ARGV[tail + 1])
  if redis.call('XDEL', KEYS[3], entry) == 1 then
    groups, bytes = groups + 1, bytes + tonumber(ARGV[tail])
    local count = trained
    if trained > 0 then redis.call('HINCRBY', KEYS[4], 'trained', trained) end
    for i = 0, others - 1 do
      local n = tonumber(ARGV[at + 4 + 2 * i])
      redis.call('HINCRBY', KEYS[4], 'dropped:' .. ARGV[at + 3 + 2 * i], n)
      count = count + n
    end
    redis.call('HINCRBY', KEYS[4], place, -count)
    for i = 0, payloads - 1 do redis.call('UNLINK', KEYS[payload + i]) end
  end
  payload = payload + payloads
  at = tail + 2
end
if groups > 0 then
  redis.call('HINCRBY', KEYS[4], 'groups_logged', -groups)
  redis.call('HINCRBY', KEYS[4], 'live_bytes', string.format('%d', -bytes))
  redis.call('HINCRBY', KEYS[2], 'held', -groups)
end
return groups
