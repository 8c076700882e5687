-- The last step of a commit in a shard: a batch's results and its marks are removed.
-- KEYS  void, trainer, results, applied, ledger, output columns of each entry ('void' key without any) ...
-- ARGV  epoch, batch id, then for each entry of the results log: entry id, bytes of its output columns
-- Returns  1, or -1 when fenced
-- include fence
redis.call('DEL', KEYS[1])
if fenced(KEYS[2], ARGV[1]) then return -1 end
for i = 3, #ARGV, 2 do
  if redis.call('XDEL', KEYS[3], ARGV[i]) == 1 then
    if redis.call('UNLINK', KEYS[6 + (i - 3) / 2]) == 1 then  -- 0 for a copy of an entry
      redis.pcall('HINCRBY', KEYS[5], 'live_bytes', string.format('%d', -tonumber(ARGV[i + 1])))
    end
  end
end
redis.call('HDEL', KEYS[4], ARGV[2], 'dead:' .. ARGV[2], 'left_out:' .. ARGV[2])
return 1
