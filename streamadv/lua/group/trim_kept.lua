-- Tell the scripts that keep what they may (lib/keep), and forget kept groups for which there is no room.
-- KEYS  void, kept, ledger, trainer, garbage, admission
-- ARGV  bytes of the shard, then the share of each kind, then 'archive' if the run has one, separated by blanks
-- Returns  number of groups forgotten; 64 = there may be more
-- include trim
if redis.call('HGET', keys.trainer, 'keep') ~= ARGV[1] then redis.call('HSET', keys.trainer, 'keep', ARGV[1]) end
return trim(ARGV[1])
