-- A shard's copy of what the trainer says of itself, for admission and the producers.
-- KEYS  void, trainer
-- ARGV  epoch, version, max_staleness ('' = no pacing), batch_groups, groups trained but not committed here,
--       drop_after ('' = never)
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
redis.call('HSET', KEYS[2], 'epoch', ARGV[1], 'version', ARGV[2], 'max_staleness', ARGV[3], 'batch_groups', ARGV[4],
  'held', ARGV[5], 'drop_after', ARGV[6])
return 1
