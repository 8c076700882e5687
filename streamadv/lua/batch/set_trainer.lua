-- Write a shard's copy of what the trainer says of itself, for admission and the producers.
-- KEYS  void, trainer, groups, admission
-- fenced by trainer
-- ARGV  fence, version, max_staleness ('' = no pacing), batch_groups, drop_after ('' = never), newest version that has
--       weights and their URI ('' = none), '1' if the trainer has ended the run, '1' when more of this follows the last
--       call, then '<entry> <id>' of groups that are trained and not committed: those that the log has count as held
-- Returns  1
-- include announce
local held = 0
for i = 9, #ARGV do
  local entry, id = string.match(ARGV[i], '^(%S+) (.*)$')
  local logged = redis.call('XRANGE', keys.groups, entry, entry)[1]
  if logged and logged[2][2] == id then held = held + 1 end  -- a server may have lost it, and given its entry to another
end
if ARGV[8] == '1' then held = held + (tonumber(redis.call('HGET', keys.trainer, 'held') or '') or 0) end
redis.call('HSET', keys.trainer, 'epoch', ARGV[1], 'session', session, 'version', ARGV[2], 'max_staleness', ARGV[3],
  'batch_groups', ARGV[4], 'held', held, 'drop_after', ARGV[5], 'weights', ARGV[6], 'finished', ARGV[7])
redis.call('HDEL', keys.trainer, 'failing')  -- note_failure's
announce()
return 1
