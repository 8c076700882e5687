-- A shard learns of a named batch: the batch owns its groups, advantage workers get its work. Done once for each batch
-- id. A group that another batch owns changes its owner; groups that the log no longer has (dead letters, or data loss)
-- are not counted.
-- KEYS  void, trainer, applied, owners, ledger, work, groups
-- fenced by trainer
-- ARGV  epoch, batch id, number of groups of the batch in this shard, then for each of them: entry id, trajectories;
--       then work items JSON ...
-- Returns  1, 0 when it was applied before
if redis.call('HSETNX', keys.applied, ARGV[2], '{}') == 0 then return 0 end
local work, count = 4 + 2 * tonumber(ARGV[3]), 0
for i = 4, work - 1, 2 do
  if #redis.call('XRANGE', keys.groups, ARGV[i], ARGV[i]) > 0 then
    local is_new = redis.call('HSET', keys.owners, ARGV[i], ARGV[2] .. ' ' .. ARGV[i + 1]) == 1
    if is_new then count = count + tonumber(ARGV[i + 1]) end
  end
end
redis.pcall('HINCRBY', keys.ledger, 'grouped', string.format('%d', -count))
redis.pcall('HINCRBY', keys.ledger, 'in_flight', string.format('%d', count))
for i = work, #ARGV do redis.call('XADD', keys.work, '*', 'work', ARGV[i]) end
-- How groups had ended by now: what comes of them from here on is what the next batch waits for.
local flat, ended = redis.call('HGETALL', keys.ledger), {}
for i = 1, #flat, 2 do
  local outcome = string.match(flat[i], '^outcome:(.+)$')
  if outcome then ended[#ended + 1] = outcome .. '=' .. flat[i + 1] end
end
redis.call('HSET', keys.trainer, 'ended_before_batch', table.concat(ended, ' '))
return 1
