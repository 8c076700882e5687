-- What a named batch means for a shard: its groups are in flight, advantage workers get their work. Done once for
-- each batch id. Groups the log no longer has (dead letters, or the server has lost them) are not counted.
-- KEYS  void, trainer, applied, ledger, work, groups
-- fenced by trainer
-- ARGV  epoch, batch id, ids of the batches the trainer knows, number of groups of the batch in this shard, then for each
--       of them: entry id, trajectories; then work items JSON ...
-- Returns  1, 0 when it was applied before
-- include marks
if redis.call('HEXISTS', keys.applied, ARGV[2]) == 1 then return 0 end
local work, count, counted, known = 5 + 2 * tonumber(ARGV[4]), 0, '', ' ' .. ARGV[3] .. ' '
for _, id in ipairs(redis.call('HKEYS', keys.applied)) do
  local is_mark = not string.find(id, ':', 1, true)  -- else dead: or left_out:
  if is_mark and not string.find(known, ' ' .. id .. ' ', 1, true) then counted = marks_of(keys.applied) end
end
for i = 5, work - 1, 2 do
  local there = #redis.call('XRANGE', keys.groups, ARGV[i], ARGV[i]) > 0
  if there and not is_marked(counted, ARGV[i]) then count = count + tonumber(ARGV[i + 1]) end
end
redis.call('HSET', keys.applied, ARGV[2], table.concat(ARGV, ' ', 5, work - 1))
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
