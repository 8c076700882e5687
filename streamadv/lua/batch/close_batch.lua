-- The last step of a commit in a shard: the batch's results are removed, and the batch itself.
-- KEYS  void, trainer, results, applied, ledger, outputs: output | void ...
-- fenced by trainer
-- ARGV  epoch, batch id, then for each entry of the results log: entry id, bytes of its output columns
-- Returns  1
for i = 3, #ARGV, 2 do
  if redis.call('XDEL', keys.results, ARGV[i]) == 1 then
    if redis.call('UNLINK', keys.outputs[(i - 1) / 2]) == 1 then  -- 0 for a copy of an entry
      redis.pcall('HINCRBY', keys.ledger, 'live_bytes', string.format('%d', -tonumber(ARGV[i + 1])))
    end
  end
end
redis.call('HDEL', keys.applied, ARGV[2])
return 1
