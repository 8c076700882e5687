-- What a named batch means for a shard: its groups are in flight, advantage workers get their work. Done once for
-- each batch id. Groups the log no longer has (dead letters, or the server has lost them) are not counted.
-- KEYS  void, trainer, applied, ledger, work, groups
-- ARGV  epoch, batch id, ids of the batches the trainer knows, number of groups of the batch in this shard, then for each
--       of them: entry id, trajectories; then work items JSON ...
-- Returns  1, 0 when it was applied before, -1 when fenced
-- include fence
-- include marks
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
if redis.call('HEXISTS', KEYS[3], ARGV[2]) == 1 then return 0 end
local work, count, counted, known = 5 + 2 * tonumber(ARGV[4]), 0, '', ' ' .. ARGV[3] .. ' '
for _, id in ipairs(redis.call('HKEYS', KEYS[3])) do
  local is_mark = not string.find(id, ':', 1, true)  -- else dead: or left_out:
  if is_mark and not string.find(known, ' ' .. id .. ' ', 1, true) then counted = marks_of(KEYS[3]) end
end
for i = 5, work - 1, 2 do
  local there = #redis.call('XRANGE', KEYS[6], ARGV[i], ARGV[i]) > 0
  if there and not is_marked(counted, ARGV[i]) then count = count + tonumber(ARGV[i + 1]) end
end
redis.call('HSET', KEYS[3], ARGV[2], table.concat(ARGV, ' ', 5, work - 1))
redis.pcall('HINCRBY', KEYS[4], 'grouped', string.format('%d', -count))
redis.pcall('HINCRBY', KEYS[4], 'in_flight', string.format('%d', count))
for i = work, #ARGV do redis.call('XADD', KEYS[5], '*', 'work', ARGV[i]) end
-- How groups had ended by now: what comes of them from here on is what the next batch waits for.
local flat, ended = redis.call('HGETALL', KEYS[4]), {}
for i = 1, #flat, 2 do
  local outcome = string.match(flat[i], '^outcome:(.+)$')
  if outcome then ended[#ended + 1] = outcome .. '=' .. flat[i + 1] end
end
redis.call('HSET', KEYS[2], 'ended_before_batch', table.concat(ended, ' '))
return 1
