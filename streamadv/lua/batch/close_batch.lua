-- The last step of a commit in a shard: a batch's results and its marks are removed.
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
redis.call('HDEL', keys.applied, ARGV[2], 'dead:' .. ARGV[2], 'left_out:' .. ARGV[2])
return 1
