-- Commit groups of one shard: their trajectories are counted as trained, except those left out, and their payloads
-- deleted. Idempotent for each group, since only the call that deletes the log entry counts it.
-- KEYS  void, trainer, groups, ledger, applied, owners, payloads: payload ...
-- fenced by trainer
-- ARGV  epoch, batch id, then for each group: entry id, number trained, number of other terminal states, reason, count, ...,
--       bytes, number of payloads
-- Returns  number of groups committed
-- include owners
local groups, bytes, at, payload = 0, 0, 3, 1
local exclusions = cjson.decode(redis.call('HGET', keys.applied, ARGV[2]) or '{}')
while at <= #ARGV do
  local entry, trained, others = ARGV[at], tonumber(ARGV[at + 1]), tonumber(ARGV[at + 2])
  local tail = at + 3 + 2 * others
  local payloads = tonumber(ARGV[tail + 1])
  if redis.call('XDEL', keys.groups, entry) == 1 then
    groups, bytes = groups + 1, bytes + tonumber(ARGV[tail])
    local count, dead = trained, math.min(trained, #(exclusions[entry] or {}))
    if trained > dead then redis.pcall('HINCRBY', keys.ledger, 'trained', trained - dead) end
    if dead > 0 then redis.pcall('HINCRBY', keys.ledger, 'dead:undecodable', dead) end
    for i = 0, others - 1 do
      local n = tonumber(ARGV[at + 4 + 2 * i])
      redis.pcall('HINCRBY', keys.ledger, 'dropped:' .. ARGV[at + 3 + 2 * i], n)
      count = count + n
    end
    redis.pcall('HINCRBY', keys.ledger, disown(keys.owners, entry), -count)
    for i = 0, payloads - 1 do redis.call('UNLINK', keys.payloads[payload + i]) end
  end
  payload = payload + payloads
  at = tail + 2
end
if groups > 0 then
  redis.pcall('HINCRBY', keys.ledger, 'groups_logged', -groups)
  redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -bytes))
  redis.pcall('HINCRBY', keys.trainer, 'held', -groups)
end
return groups
