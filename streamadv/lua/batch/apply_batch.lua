-- A shard learns of a named batch: the batch owns its groups, and with the last of them advantage workers get its work.
-- Done once for each batch id. A group that another batch owns changes its owner; groups that the log no longer has (dead
-- letters, or data loss) are not counted.
-- KEYS  void, trainer, applied, owners, ledger, work, groups
-- fenced by trainer
-- ARGV  fence, batch id, outcomes of groups separated by blanks, number of groups, then for each of them:
--       '<entry id> <trajectories>'; then work items JSON ...: with them the batch is complete in this shard
-- Returns  1, 0 when it was applied before
if redis.call('HEXISTS', keys.applied, ARGV[2]) == 1 then return 0 end
local last, count, entries, trajectories = 4 + tonumber(ARGV[4]), 0, {}, {}
for i = 5, last do entries[i - 4], trajectories[i - 4] = string.match(ARGV[i], '^(%S+) (%d+)$') end
local owners, owned = #entries > 0 and redis.call('HMGET', keys.owners, unpack(entries)), {}
for i, entry in ipairs(entries) do
  if #redis.call('XRANGE', keys.groups, entry, entry) > 0 then
    owned[#owned + 1], owned[#owned + 2] = entry, ARGV[2] .. ' ' .. trajectories[i]
    if not owners[i] then count = count + trajectories[i] end
  end
end
if #owned > 0 then redis.call('HSET', keys.owners, unpack(owned)) end
redis.pcall('HINCRBY', keys.ledger, 'grouped', string.format('%d', -count))
redis.pcall('HINCRBY', keys.ledger, 'in_flight', string.format('%d', count))
if last == #ARGV then return 1 end
for i = last + 1, #ARGV do redis.call('XADD', keys.work, '*', 'work', ARGV[i]) end
redis.call('HSET', keys.applied, ARGV[2], '{}')
-- How groups had ended by now: what comes of them from here on is what the next batch waits for.
local outcomes, fields, ended = {}, {}, {}
for outcome in string.gmatch(ARGV[3], '%S+') do
  outcomes[#outcomes + 1], fields[#fields + 1] = outcome, 'outcome:' .. outcome
end
for i, groups in ipairs(redis.call('HMGET', keys.ledger, unpack(fields))) do
  if groups then ended[#ended + 1] = outcomes[i] .. '=' .. groups end
end
redis.call('HSET', keys.trainer, 'ended_before_batch', table.concat(ended, ' '))
return 1
